"""What is shown: text that stays one plain line, pages, and numbers that are still bounds."""
