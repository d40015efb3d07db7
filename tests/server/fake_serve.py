"""The `banyan` command with the fake core in place of the engine."""

from functools import partial

import banyan.server.serve as module
from banyan.cli import main

if __name__ == "__main__":
    module.serve = partial(module.serve, build="fake_core:build", tokenizer="fake_core:tokenizer")
    main()
