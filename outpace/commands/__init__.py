"""One file per subcommand: `add_arguments` describes it, `execute` does it. Loaded only when chosen."""
