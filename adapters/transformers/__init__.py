"""Adapter that patches stock Hugging Face transformers."""
