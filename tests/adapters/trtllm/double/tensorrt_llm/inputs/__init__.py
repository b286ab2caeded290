"""Inputs of requests."""
