"""Pools of real processes: agents as they are installed, each beside a stub engine process of its own."""
