from eqfuse.tile import printer as printer  # so that tile programs have a text
