"""Passes that split a model or change how its layers run; every one of them leaves the numbers as they are."""
