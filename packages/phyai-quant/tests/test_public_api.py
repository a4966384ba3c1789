import subprocess
import sys


def test_plans_are_read_without_torch():
    code = (
        "import sys, phyai_quant.policy_section, phyai_quant.importers.registry;"
        "import phyai_quant.specs.base;"
        "heavy = {'torch', 'piper_kernels', 'humming', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_asking_for_humming_does_not_import_it():
    code = """
import sys
from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
weight = TensorQuant("int4", "block", block_shape=(1, 128))
for online in (False, True):
    try:
        materialize(QuantScheme(weight, online=online), 90)
    except QuantConfigError as error:
        assert "humming-kernels is not installed" in str(error), error
sys.exit("humming was imported" if "humming" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
