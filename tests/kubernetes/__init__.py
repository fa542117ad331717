"""Tests on a real Kubernetes control plane, with a small kubelet that makes pods real processes."""
