"""Seeded simulation of whole agents on virtual time: real loops and core, a pretended world around them."""
