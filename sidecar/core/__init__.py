"""Pure decisions: no asyncio, no input or output, no clock, no global random."""
