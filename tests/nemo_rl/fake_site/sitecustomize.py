"""For interpreters with a fake NeMo RL: the list of replacements is a short one.

The real one imports Ray's parts, which the fake Ray does not have.
"""

import sys


class SmallBinding:
    """Finds one module beside this file, and no other."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "nemo_rl_rlix.nemo_rl.binding":
            return None
        import importlib.util
        import os

        file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "small_binding.py")
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.insert(0, SmallBinding)
