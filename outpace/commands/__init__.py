"""One module per subcommand: `add_arguments` adds its options, `execute` runs it. Loaded only when chosen."""
