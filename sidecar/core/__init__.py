"""The pure core: no asyncio, no input or output, no clock, no global random. Same inputs, same answer."""
