"""Programs over several ranks: axes on the dimensions of a mesh, and the derived merge as what ranks exchange."""
