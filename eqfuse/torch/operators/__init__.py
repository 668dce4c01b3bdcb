"""What ATen operators compute, as values: one table, from the name of an operator to what makes its value."""
