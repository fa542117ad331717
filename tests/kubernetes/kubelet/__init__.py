"""A small kubelet for the tests: pods bound to its nodes become real processes on this machine.

Each pod has a network namespace with an address of its own, each container a mount namespace with a root of its own (an
overlay over this machine's, so the programs are there, and writes go nowhere). It runs init containers and native
sidecars in order, probes, hooks, restarts with back-off and deletions with grace, and writes the pods' status. It goes
on while the API server is gone, and its processes die with it.
"""
