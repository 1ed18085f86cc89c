"""The auditor, which shares no code with the selector."""
