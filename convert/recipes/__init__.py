"""One module per recipe; the table is in `edge_convert.convert.recipe`."""
