"""No source of Weft can run code that a file names: no pickle, no eval, no unsafe YAML; the exceptions are listed."""

import ast

from source_trees import dotted, nodes, trees

# What may appear, and why it runs nothing that a file names.
ALLOWED = {
    ("parallel/ranks.py", "pickle.loads"): "an exception of this process, pickled the line before",
    ("parallel/ranks.py", "pickle.dumps"): "the same",
    ("data/stores/external/pbin.py", "pickle.Unpickler"): "refuses every name: lists, tuples and numbers only",
    ("checkpoint/distributed/inert_pickle.py", "pickle.Unpickler"): "records names and arguments, calls nothing",
    ("config/signature.py", "ast.literal_eval"): "literals only",
    ("cli/export.py", "ast.literal_eval"): "literals only",
    ("planner/parallelize/read.py", "ast.literal_eval"): "literals only",
}
NAMES = {
    *("eval", "exec", "__import__", "pickle.load", "pickle.loads", "pickle.dumps", "pickle.Unpickler"),
    *("cloudpickle.load", "cloudpickle.loads", "dill.load", "joblib.load", "marshal.loads", "marshal.load"),
    *("shelve.open", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "ast.literal_eval", "pandas.read_pickle"),
    *("os.system", "os.popen", "torch.hub.load", "torch.jit.load"),
}

SAFE = {"weights_only", "allow_pickle", "typ", "shell", "trust_remote_code"}  # arguments


def calls():
    """Each call and each base class of the sources: (file, dotted name, node)."""
    for name, tree in trees().items():
        for node in nodes(tree):
            if isinstance(node, ast.Call):
                yield name, dotted(node.func), node
            elif isinstance(node, ast.ClassDef):
                yield from ((name, dotted(base), node) for base in node.bases)


def test_only_listed_calls_unpickle_or_evaluate():
    found = {(file, called) for file, called, _ in calls() if called in NAMES}
    assert found == set(ALLOWED)


def test_files_of_torch_numpy_and_yaml_are_read_as_data():
    seen = set()
    for file, called, node in calls():
        if not isinstance(node, ast.Call):
            continue
        given = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg in SAFE}
        if called == "torch.load":
            assert given.get("weights_only") == "True", file
        if called in ("np.load", "numpy.load"):
            assert given.get("allow_pickle") == "False", file
        if called in ("YAML", "ruamel.yaml.YAML"):
            assert given.get("typ") in ("'safe'", "'rt'"), file
        if called.startswith("subprocess.") or called.endswith("Popen"):
            assert given.get("shell", "False") == "False", file
        if given.get("trust_remote_code", "False") != "False":
            raise AssertionError(f"{file} runs code of a Hugging Face folder")
        seen.add(called)
    assert {"torch.load", "np.load", "subprocess.run"} <= seen  # the test sees what it looks for
