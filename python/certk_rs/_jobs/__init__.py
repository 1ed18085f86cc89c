"""Jobs on saved caches: prune, verify, analyze, report and inspect."""
