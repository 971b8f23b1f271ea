"""Recipes: runs that a reader can repeat. They have stages, stored results, and a band in which a repeated run must end."""
