"""What a run tells people: files, live progress, a report."""
