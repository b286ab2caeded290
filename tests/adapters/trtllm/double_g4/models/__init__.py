"""Importing the package registers no model: a model's module is when its architecture is looked up."""
