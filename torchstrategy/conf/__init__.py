"""Files for hydra that name the strategies; hydra reads them, and nothing of the library does.

A configuration of yours finds them by ``hydra: {searchpath: ["pkg://torchstrategy.conf"]}``, chooses one in its
defaults, ``- strategy: mirrored``, or on the command line, ``strategy=multi_worker_mirrored``, and the program makes it
by ``hydra.utils.instantiate(config.strategy, _convert_="all")``.
"""
