"""What the reading of a model is overruled by: model classes, patterns of module names, and why they stay whole.

Nothing needs to be here for a model that is read rightly, and what is not proved is left whole anyway.
"""

WHOLE: dict[str, dict[str, str]] = {}
