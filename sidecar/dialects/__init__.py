"""See the package docstring of sidecar."""
