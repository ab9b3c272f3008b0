"""What steps and drafts cost on this machine, how that is measured and where it is kept."""
