"""Structured output: answers that belong to a language, by ruling out every token that would leave it."""
