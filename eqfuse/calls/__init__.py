"""From a call to what runs it: sizes and their regions (`regions`, `reuse`), plans (`specialization`), what runs them (`runners`),
cached calls (`call_cache`), ways to run one (`routing`), and calls whose arguments are fixed (`launches`)."""
