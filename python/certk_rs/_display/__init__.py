"""Text that stays one plain line, pages, and numbers that are still bounds when shown."""
