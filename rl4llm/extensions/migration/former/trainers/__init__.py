"""Modules of trainers, one for each method."""
