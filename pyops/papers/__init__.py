"""One module per paper: its method, on top of the ops. See seeds/<paper>/ for what each reproduces."""
