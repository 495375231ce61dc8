"""`python -m surefit`, and the file that SureFit starts its own worker processes with (core/processes.py)."""

if __name__ == "__main__" and not __package__:
    # Started as a file, with -P: the package must be the one that holds this file, even if another module is called
    # surefit.
    import sys
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    _here = Path(__file__).resolve().parent
    _spec = spec_from_file_location("surefit", _here / "__init__.py", submodule_search_locations=[str(_here)])
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["surefit"] = _package = module_from_spec(_spec)
    _spec.loader.exec_module(_package)
    sys.path.append(str(_here.parent))  # so that this process's workers find the package

if __name__ == "__main__":
    from surefit.cli.app import main

    main()
