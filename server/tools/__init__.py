"""Tools and reasoning: what a request may ask for, what constrains the answer, and how the answer's text is taken apart."""
