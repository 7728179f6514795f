"""Training a model as a recipe says: from text to a model, its curve and a sample of its writing."""
