"""What `import keras_ddl` imports, and what it does not."""

import subprocess
import sys

import keras_ddl
from harness.source_modules import MODULES


def test_import_is_lazy():
    code = (
        "import sys, keras_ddl; "
        "heavy = {'tensorflow', 'keras', 'mpi4py', 'numpy', 'ctypes'} & set(sys.modules); "
        "assert not heavy, heavy; dir(keras_ddl); keras_ddl.errors; keras_ddl.topology; keras_ddl.init; "
        "heavy = {'tensorflow', 'keras', 'mpi4py'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_listed_and_an_unknown_one_is_an_attribute_error():
    assert set(keras_ddl._HOME_OF) | set(keras_ddl._MODULES) <= set(keras_ddl.__all__) <= set(dir(keras_ddl))
    assert len(set(keras_ddl.__all__)) == len(keras_ddl.__all__)
    assert not hasattr(keras_ddl, "world_size")


def test_topology_is_a_function_although_a_module_has_that_name():
    import keras_ddl.communicator
    from keras_ddl.topology import Topology

    assert callable(keras_ddl.topology)
    assert Topology.__module__ == "keras_ddl.topology"


def test_every_module_of_export_can_be_imported_first():
    names = [name for name in MODULES if name.startswith("keras_ddl.export.")]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for known in [each for each in sys.modules if each.startswith('keras_ddl.export')]:\n"
        "        del sys.modules[known]\n"
        "    importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", program, *names], check=True, timeout=120)
