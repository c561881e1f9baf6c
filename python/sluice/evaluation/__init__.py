"""Policies held against a model's own attention, on texts and on tasks: python -m sluice eval. Needs torch and
transformers."""
