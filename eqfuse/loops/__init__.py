from eqfuse.loops import printer as printer  # so that loop nests have a text
