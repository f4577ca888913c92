"""Weights and forward passes."""
