"""Tells which functions and classes of torch the code of a test replaces or removes, and which modules it loads."""

import sys


def snapshot():
    found = {}
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "torch"]:
        owners = [module] + [each for each in list(vars(module).values()) if isinstance(each, type)]
        for owner in owners:
            if owner is module or owner.__module__.split(".")[0] == "torch":
                for name, value in list(vars(owner).items()):
                    if callable(value) or hasattr(type(value), "__get__"):
                        found[id(owner), name] = owner, value
    return found


def replaced_by(test, code):
    assert not any(name.startswith(("asyncdist.torch_backend", "asyncdist.sync")) for name in sys.modules)
    before = snapshot()
    exec(code, {})
    after = snapshot()
    replaced = {
        f"{owner.__module__}.{owner.__name__}.{name}" if isinstance(owner, type) else f"{owner.__name__}.{name}"
        for (at, name), (owner, value) in before.items()
        if (at, name) not in after or after[at, name][1] is not value
    }
    test.send(sorted(replaced))
    test.recv()


def loaded(test):
    test.send([name for name in sys.modules if name.startswith("asyncdist")])
    test.recv()
