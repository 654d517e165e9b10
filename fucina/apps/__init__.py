"""Programs: each is one module with `main(argv)`, and one command of `fucina`."""
