"""Whose code a recipe may name: judged before anything is imported (tier: no process)."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperslab.errors import DataError, RecipeError
from hyperslab.recipe import trust as trust_module
from hyperslab.recipe.instantiate import A_LOSS, A_NETWORK, A_SOURCE, AN_OPTIMIZER, Maker, RightKind
from hyperslab.recipe.load import load_recipe, recipe_of_values, remember_code
from hyperslab.recipe.section import TargetSection
from hyperslab.recipe.trust import Trust, located, trust_of, with_memory
from hyperslab.studies.sweep.schema import load_sweep
from hyperslab.train.loggers import A_LOGGER

NET = """
import pathlib
from collections import OrderedDict
from torch import nn
from torch.nn import Linear

pathlib.Path({mark!r}).touch()

class Net(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv3d(channels, 1, 1)

def network(channels: int) -> nn.Module:
    return Net(channels)
"""


def make(
    target: str, *modules: str, kind: RightKind = A_NETWORK, own: bool = False, **arguments: Any
) -> Any:
    context = {"trust": Trust(own=own, modules=modules, file="run/recipe.yaml")}
    section = TargetSection.model_validate({"target": target, **arguments}, context=context)
    return Maker("model", kind)(section)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that is there once a module was imported."""
    return tmp_path / "mark"


@pytest.fixture
def installed(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, with one in it; the current folder is another one."""
    home = tmp_path / "site-packages"
    (home / "pkg_of_trust" / "nets").mkdir(parents=True)
    (home / "pkg_of_trust" / "__init__.py").touch()
    (home / "pkg_of_trust" / "nets" / "__init__.py").write_text(NET.format(mark=str(mark)))
    (home / "pkg_of_trust" / "again.py").write_text("from pkg_of_trust.nets import Net\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path, str(home)])
    monkeypatch.setattr(trust_module, "_installed_homes", lambda: {str(home)})
    for name in [name for name in sys.modules if name.startswith("pkg_of_trust")]:
        monkeypatch.delitem(sys.modules, name)
    yield home
    for name in [name for name in sys.modules if name.startswith("pkg_of_trust")]:
        del sys.modules[name]


def test_an_installed_class_needs_a_word_and_the_error_has_it(installed: Path, mark: Path) -> None:
    name = "pkg_of_trust.nets.Net"
    words = rf"run/recipe.yaml: model\.target {name} \(.*__init__\.py\) is not hyperslab's"
    with pytest.raises(RecipeError, match=rf"(?s){words}.*add --trust pkg_of_trust\.nets$"):
        make(name, channels=1)
    with pytest.raises(RecipeError, match=words):
        make(name, "pkg_of_trust.net", channels=1)  # no part of its name
    assert not mark.exists()
    for module in ("pkg_of_trust.nets", "pkg_of_trust"):
        assert type(make(name, module, channels=1)).__name__ == "Net"
    assert mark.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nets.network", "is a function, and a run's folder may name classes only"),
        ("nets.pathlib", "is a module, and a run's folder may name classes only"),
        ("nets.OrderedDict", "is defined elsewhere, in collections"),
        ("nets.Linear", r"is defined elsewhere, in torch\.nn"),
        ("nets.Nett", "has no 'Nett'"),
        ("net.Net", "cannot be imported: .*No module named"),
    ],
)
def test_of_a_trusted_module_only_its_own_classes_are_made(
    installed: Path, name: str, words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        make(f"pkg_of_trust.{name}", "pkg_of_trust", channels=1)
    if name == "nets.network":
        return
    with pytest.raises(RecipeError):
        make("pkg_of_trust.again.Net", "pkg_of_trust.again", channels=1)
    assert make("pkg_of_trust.again.Net", "pkg_of_trust", channels=1)


@pytest.mark.parametrize("place", ["first on the path", "a part of the package", "here"])
def test_what_is_not_installed_is_not_imported_by_a_trusted_name(
    installed: Path, mark: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "here" / "pkg_of_trust"
    other.mkdir()
    (other / "evil.py").write_text(NET.format(mark=str(mark)))
    if place == "a part of the package":  # without __init__.py a folder joins the others
        (installed / "pkg_of_trust" / "__init__.py").unlink()
        (installed / "pkg_of_trust" / "nets" / "__init__.py").unlink()
    if place == "first on the path":
        (other / "__init__.py").write_text(NET.format(mark=str(mark)))
    if place != "here":
        monkeypatch.setattr(sys, "path", [str(tmp_path / "here"), *sys.path])
    with pytest.raises(RecipeError, match=r"is not hyperslab's|No module named"):
        make("pkg_of_trust.evil.Net", "pkg_of_trust", channels=1)
    assert not mark.exists()


ATTACKS: dict[str, dict[str, Any]] = {
    "torch.fx.graph_module.reduce_graph_module": {
        "body": {"_code": "def forward(self, x): return x\n"},
        "import_block": "open('attacked', 'w')\n",
    },
    "torch.hub.load": {"repo_or_dir": ".", "source": "local", "model": "x"},
    "torch.load": {"f": "attacked", "weights_only": False},
    "torch.jit.load": {"f": "attacked"},
    "torch.nn.functional.boolean_dispatch": {},
    "torch.nn.modules.module.torch.load": {},
    "functools.partial": {"func": "x"},
    "builtins.eval": {"source": "open('attacked', 'w')"},
    "pickle.loads": {},
    "subprocess.Popen": {"args": "touch attacked", "shell": True},
    "os.system": {"command": "touch attacked"},
    "hyperslab.recipe.load.yaml.load": {},
    "hyperslab.recipe.trust.importlib.import_module": {"name": "evil"},
    "hyperslab.recipe.trust.TypeAdapter": {},
    "hyperslab": {},
    "torch.optim.lr_scheduler.partial": {},
}


@pytest.mark.parametrize("trusted", [False, True], ids=["", "with a word for its package"])
@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_runs_its_arguments(
    name: str, trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    modules = (name.partition(".")[0],) if trusted else ()
    inner = {"target": name, **ATTACKS[name]}
    for kind in (A_NETWORK, A_LOSS, AN_OPTIMIZER):
        with pytest.raises(RecipeError):
            make(name, *modules, kind=kind, **ATTACKS[name])
        with pytest.raises(RecipeError):
            make("torch.nn.TransformerEncoder", *modules, encoder_layer=inner, num_layers=1)
        with pytest.raises(RecipeError):
            make("torch.nn.ModuleList", *modules, modules=[inner])
    assert os.listdir(tmp_path) == []


def test_hyperslabs_own_and_torchs_layers_losses_and_optimizers_need_no_word() -> None:
    assert make("hyperslab.models.UNet3D", in_channels=1, classes=2, channels=2, levels=1)
    assert make("torch.nn.Conv3d", in_channels=1, out_channels=1, kernel_size=1)
    assert make("torch.nn.functional.huber_loss", kind=A_LOSS, delta=0.5)
    assert make("hyperslab.losses.dice_loss", kind=A_LOSS)
    assert "torch.nn.Module" in trust_module.listed()
    assert "torch.nn.DataParallel" not in trust_module.listed()


def test_no_recipe_says_what_a_scan_has_found(tmp_path: Path) -> None:
    """It could say that other files were found, with numbers that are none, or links to follow."""
    kinds = {"shape": [1, 4, 4, 4], "samples": 3}
    assert make("hyperslab.formats.synthetic.SyntheticVolumes", kind=A_SOURCE, **kinds)
    found = {
        "folder": str(tmp_path),
        "volumes": [{"key": "", "shape": [1, 4, 4, 4], "dtype": "|O"}],
        "allowed": {"outside_files": True},
    }
    sources = [
        *("arrays.source.NpyFolder", "arrays.source.Hdf5Folder", "arrays.source.ArrayFolder"),
        *("tfrecord.source.Sc18Folder", "tfrecord.source.TfRecordFolder"),
        "nifti.source.NiftiFolder",
    ]
    for name in sources:
        with pytest.raises(RecipeError, match="reads or writes what its arguments say"):
            make(f"hyperslab.formats.{name}", kind=A_SOURCE, catalog=found)


@pytest.mark.parametrize("name", ["TensorboardLog", "WandbLog", "MlflowLog", "BackgroundLog"])
def test_no_recipe_says_where_a_logger_writes(name: str, tmp_path: Path) -> None:
    """Their own names are how a recipe asks for them: then they write into the run's folder."""
    place = {"run": str(tmp_path / "planted"), "settings": {}, "step": 0}
    with pytest.raises(RecipeError, match="reads or writes what its arguments say"):
        make(f"hyperslab.train.loggers.{name}", kind=A_LOGGER, **place)
    assert os.listdir(tmp_path) == []


def test_who_has_written_a_recipe_is_told_by_where_it_lies(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    run = tmp_path / "runs" / "x"
    (run / "checkpoints").mkdir(parents=True)
    for file in (own, run / "recipe.yaml", run / "other.yaml", run / "logs" / "deep.yaml"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    (tmp_path / "a-link.yaml").symlink_to(run / "recipe.yaml")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "recipe.yaml").symlink_to(own)
    assert trust_of(own).own
    for name in ("recipe.yaml", "other.yaml", "logs/deep.yaml"):
        assert not trust_of(run / name).own, name
        assert not trust_of(run / name, begins=True).own, name
    assert not trust_of(tmp_path / "a-link.yaml", begins=True).own
    assert not trust_of(tmp_path / "bare" / "recipe.yaml").own
    assert trust_of(tmp_path / "bare" / "recipe.yaml", begins=True).own  # nothing was trained


@pytest.fixture
def home(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a module of the user's and a recipe that names it."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "net_of_mine.py").write_text(NET.format(mark=str(mark)))
    model = {"target": "net_of_mine.network", "channels": 1}
    data = {"path": "x", "batch_size": 1, "plugins": ["net_of_mine"]}
    named = Trust(named=frozenset({"net_of_mine.network", "net_of_mine"}))
    recipe = recipe_of_values({"model": model, "data": data, "output": "run"}, "fit", trust=named)
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    remember_code(recipe)
    (home / "run").mkdir()
    values = recipe.model_dump(mode="json")
    (home / "run" / "recipe.yaml").write_text(yaml.safe_dump(values))
    yield home
    sys.modules.pop("net_of_mine", None)


def is_trusted(home: Path, **changes: Any) -> bool:
    """Whether a run's recipe may name the user's network, and what was tried."""
    values = yaml.safe_load((home / "run" / "recipe.yaml").read_text())
    file = home / "run" / "recipe.yaml"
    for key, value in changes.items():
        values[key].update(value)
    file.write_text(yaml.safe_dump(values))
    return bool(load_recipe(file).trust.trained)


def test_what_the_user_has_trained_with_needs_no_word(home: Path, mark: Path) -> None:
    recipe = load_recipe("run/recipe.yaml")
    assert not mark.exists()
    assert type(Maker("model", A_NETWORK)(recipe.model)).__name__ == "Net"
    assert is_trusted(home, data={"path": "moved", "batch_size": 3})
    (home / "run").rename(home / "renamed")
    assert load_recipe("renamed/recipe.yaml").trust.trained
    (home / "net_of_mine.py").write_text(NET.format(mark="edited"))
    assert load_recipe("renamed/recipe.yaml").trust.trained


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"channels": 2}},
        {"model": {"target": "net_of_mine.Net"}},
        {"data": {"plugins": ["net_of_mine", "json"]}},
        {"optimizer": {"name": "target", "target": "net_of_mine.network"}},
        {"optimizer": {"name": "target", "target": "hyperslab.launch.supervisor.subprocess.run"}},
    ],
)
def test_other_names_and_arguments_are_another_run(home: Path, changes: Any) -> None:
    assert is_trusted(home)
    assert not is_trusted(home, **changes)


def test_a_name_in_bytes_is_none(home: Path) -> None:
    """The memory of trained names would not know it as a name, but its caller would."""
    assert is_trusted(home)
    with pytest.raises(RecipeError, match="the value is not valid YAML"):
        load_recipe(home / "run" / "recipe.yaml", ["loss.target=!!binary bmV0"])
    values = yaml.safe_load((home / "run" / "recipe.yaml").read_text())
    values["loss"] = {"target": b"net_of_mine.network", "channels": 7}
    (home / "run" / "recipe.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(
        RecipeError, match=r"recipe\.yaml is not valid YAML: .*tag:yaml\.org,2002:binary"
    ):
        load_recipe(home / "run" / "recipe.yaml")


def test_a_module_elsewhere_is_another_one(
    home: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = home.parent / "other"
    other.mkdir()
    (other / "net_of_mine.py").write_text(NET.format(mark=str(mark)))
    monkeypatch.chdir(other)
    with pytest.raises(RecipeError, match=r"model\.target net_of_mine\.network .*other/net_of_m"):
        Maker("model", A_NETWORK)(load_recipe(home / "run" / "recipe.yaml").model)
    with pytest.raises(RecipeError, match=r"name it on the command line: data\.plugins=\[net_of"):
        load_recipe(home / "run" / "recipe.yaml").data.origin  # noqa: B018
    assert not mark.exists()
    (other / "net_of_mine.py").rename(other / "none.py")
    words = r"no module net_of_mine is found from here; if it is yours, run where it lies"
    with pytest.raises(RecipeError, match=words):
        Maker("model", A_NETWORK)(load_recipe(home / "run" / "recipe.yaml").model)
    (other / "none.py").rename(other / "net_of_mine.py")
    named = load_recipe(home / "run" / "recipe.yaml", ["model.target=net_of_mine.network"])
    assert Maker("model", A_NETWORK)(named.model)
    assert mark.exists()


def test_a_folder_that_is_found_twice_is_one_place(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a sweep's ranks, which look in the current folder, know what PYTHONPATH has found."""
    (home / "nets_of_mine").mkdir()
    (home / "net_of_mine.py").rename(home / "nets_of_mine" / "net.py")
    monkeypatch.setattr(sys, "path", [str(home), *sys.path])
    once = located("nets_of_mine.net.network")
    monkeypatch.setattr(sys, "path", [str(home), *sys.path])
    assert located("nets_of_mine.net.network") == once
    assert once == (str(home / "nets_of_mine"), str(home / "nets_of_mine" / "net.py"))


def test_code_that_was_allowed_by_nobody_is_not_noted(home: Path, tmp_path: Path) -> None:
    """An argument that another one hides is never made, so no training has judged what it names."""
    hidden = {"target": "net_of_mine.network"}
    inner = {"target": "torch.optim.lr_scheduler.ConstantLR", "arguments": {"factor": 0.5}}
    schedule = {
        "target": "torch.optim.lr_scheduler.ChainedScheduler",
        "schedulers": [{**inner, "factor": hidden}],
    }
    values = {"optimizer": {"schedule": schedule}, "data": {"path": "x", "batch_size": 1}}
    notes = [*(tmp_path / "state" / "hyperslab" / "trained").iterdir()]
    for trust in (Trust(), Trust(modules=("net_of_mine",))):
        remember_code(recipe_of_values({**values, "output": "run"}, "a file", trust=trust))
    assert [*(tmp_path / "state" / "hyperslab" / "trained").iterdir()] == notes
    remember_code(recipe_of_values({**values, "output": "run"}, "a file", trust=Trust(own=True)))
    assert len([*(tmp_path / "state" / "hyperslab" / "trained").iterdir()]) == len(notes) + 1


def test_what_lies_in_a_list_is_named_by_the_key_of_the_error(home: Path) -> None:
    layers = [{"target": "torch.nn.Flatten"}, {"target": "net_of_mine.Net", "channels": 1}]
    is_trusted(home, model={"target": "torch.nn.ModuleList", "modules": layers})
    values = yaml.safe_load((home / "run" / "recipe.yaml").read_text())
    del values["model"]["channels"]
    (home / "run" / "recipe.yaml").write_text(yaml.safe_dump(values))
    key = "model.modules.1.target"
    with pytest.raises(RecipeError, match=rf"name it on the command line: {key}=net_of_mine\.Net"):
        Maker("model", A_NETWORK)(load_recipe("run/recipe.yaml").model)
    named = load_recipe("run/recipe.yaml", [f"{key}=net_of_mine.Net"])
    assert type(Maker("model", A_NETWORK)(named.model)[1]).__name__ == "Net"


def test_a_strangers_sweep_gives_the_users_network_no_other_arguments(home: Path) -> None:
    """The user's own sweep of the same run does."""
    words = "variants: {a: {model.channels: 2}}\nrates: [0.1]\nseeds: [0]\n"
    theirs = home / "theirs"
    (theirs / "checkpoints").mkdir(parents=True)
    (theirs / "recipe.yaml").touch()
    for folder in (home, theirs):
        (folder / "sweep.yaml").write_text(f"recipe: {home}/run/recipe.yaml\n{words}")
    (variant,) = load_sweep(home / "sweep.yaml").variants
    assert Maker("model", A_NETWORK)(variant.recipe.model).layer.in_channels == 2
    (variant,) = load_sweep(theirs / "sweep.yaml").variants
    with pytest.raises(RecipeError, match=r"name it on the command line: model\.target="):
        Maker("model", A_NETWORK)(variant.recipe.model)
    (theirs / "sweep.yaml").write_text(
        f"recipe: {home}/run/recipe.yaml\n{words}".replace("model.channels", "epochs")
    )
    (variant,) = load_sweep(theirs / "sweep.yaml").variants
    assert Maker("model", A_NETWORK)(variant.recipe.model)


@pytest.mark.parametrize("odd", [{1: "a", "x": "b"}, {"s": {"b", "a"}}, {None: {True: [1]}}])
def test_odd_values_are_compared_too(home: Path, odd: Any) -> None:
    assert not is_trusted(home, model={"table": odd})
    with pytest.raises(RecipeError, match=r"override data\.plugins=: bad value 5"):
        load_recipe("run/recipe.yaml", ["data.plugins=5"])


@pytest.mark.parametrize("what", ["folder", "above", "a link"])
def test_what_others_may_write_to_says_nothing(home: Path, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "state" / "hyperslab" / "trained"
    if what == "a link":
        (note,) = folder.iterdir()
        note.rename(folder / "other")
        note.symlink_to(folder / "other")
        assert not is_trusted(home)
        return
    (folder if what == "folder" else folder.parent).chmod(0o777)
    assert not is_trusted(home)
    recipe = load_recipe("run/recipe.yaml")
    with pytest.raises(RecipeError, match=r"others may write to it, chmod go-w: .*hyperslab"):
        Maker("model", A_NETWORK)(recipe.model)


def test_plugins_of_a_run_wait_until_its_data_are_opened(home: Path, mark: Path) -> None:
    is_trusted(home, data={"format": "of_a_plugin"})
    recipe = load_recipe("run/recipe.yaml")
    assert not mark.exists()
    recipe.data.origin  # noqa: B018
    assert mark.exists()
    own = home / "own.yaml"
    own.write_text(yaml.safe_dump({"data": {"path": "x", "batch_size": 1, "plugins": ["no_such"]}}))
    with pytest.raises(RecipeError, match="plugin 'no_such': cannot be imported"):
        load_recipe(own)
    trusted = load_recipe(
        "run/recipe.yaml",
        ["data.plugins=[no_such]"],
    )
    with pytest.raises(DataError, match="plugin 'no_such': cannot be imported"):
        trusted.data.origin  # noqa: B018


def test_where_modules_lie_is_told_without_importing(
    tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "folder_of_trust" / "sub"
    here.mkdir(parents=True)
    (here / "deep.py").write_text(NET.format(mark=str(mark)))
    monkeypatch.chdir(tmp_path)
    places = located("folder_of_trust.sub.deep.Net")
    assert places == (str(here.parent), str(here), str(here / "deep.py"))
    assert located("torch.nn.Conv3d")[-1].endswith("nn/__init__.py")
    assert located("no_such_module.Net") == ()
    assert not mark.exists()


def test_a_recipe_without_code_asks_for_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/nonexistent")
    monkeypatch.setattr(trust_module, "_memory", lambda: pytest.fail("was looked at"))
    values = {"optimizer": {"target": "torch.optim.AdamW"}, "data": {"plugins": []}}
    assert not with_memory(Trust(), values).trained


@pytest.mark.parametrize(
    ("key", "value", "otherwise"), [("outside_files", True, False), ("staging", "/else", None)]
)
def test_a_run_reaches_no_other_files_unless_the_user_says_so(
    home: Path, key: str, value: object, otherwise: object
) -> None:
    """Or has trained with that on the same data here."""

    def taken(*overrides: str, varied: list[str] | None = None) -> object:
        file = home / "run" / "recipe.yaml"
        data = load_recipe(file, overrides, varied=varied or []).data
        return getattr(data, key) and str(getattr(data, key))

    said = f"data.{key}={value}"
    is_trusted(home, data={key: value, "path": "/theirs"})
    assert taken() in (otherwise, False)
    assert load_recipe(home / "run" / "recipe.yaml").trust.left_out[0].startswith(f"data.{key}=")
    assert taken(said) == str(value)
    is_trusted(home, data={key: ""})  # a path, too: the current folder
    assert taken() in (otherwise, False)
    is_trusted(home, data={key: otherwise})
    assert taken(varied=[said]) in (otherwise, False)
    own = home / "own.yaml"
    own.write_text(
        yaml.safe_dump({"data": {"path": "/theirs", "batch_size": 1, key: value}, "output": "run"})
    )
    remember_code(load_recipe(own))
    is_trusted(home, data={key: value})
    assert taken() == taken("data.path=elsewhere") == str(value)
    is_trusted(home, data={key: value, "path": "/others"})
    assert taken() in (otherwise, False)


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_a_run_talks_to_a_service_where_the_user_says_so(home: Path, service: str) -> None:
    """Or has trained with it in this very folder."""

    def loggers(*overrides: str, folder: str = "run", varied: Sequence[str] = ()) -> list[Any]:
        file = home / folder / "recipe.yaml"
        return [*load_recipe(file, overrides, varied=[*varied]).loggers]

    file = home / "run" / "recipe.yaml"
    values = yaml.safe_load(file.read_text()) | {"loggers": ["csv", service, "tensorboard"]}
    file.write_text(yaml.safe_dump(values))
    assert loggers() == ["csv", "tensorboard"]
    assert loggers("data.path=x") == ["csv", "tensorboard"]
    assert load_recipe(file).trust.left_out == (f'loggers=["{service}"]',)
    assert loggers(f"loggers=[{service}]") == [service]
    assert loggers(varied=[f"loggers=[{service}]"]) == []
    file.write_text(yaml.safe_dump(values | {"loggers": {service}}))
    assert loggers() == []
    file.write_text(yaml.safe_dump(values))
    own = home / "own.yaml"
    own.write_text(yaml.safe_dump(values | {"output": "run"}))
    remember_code(load_recipe(own))
    assert loggers() == ["csv", service, "tensorboard"]
    (home / "theirs" / "checkpoints").mkdir(parents=True)
    (home / "theirs" / "recipe.yaml").write_text(file.read_text())
    assert loggers(folder="theirs") == ["csv", "tensorboard"]
    (home / "theirs" / "sweep.yaml").write_text(
        f"recipe: {file}\nvariants: {{a: {{}}}}\nrates: [0.1]\nseeds: [0]\n"
    )
    (variant,) = load_sweep(home / "theirs" / "sweep.yaml").variants
    assert variant.recipe.loggers == ("csv", "tensorboard")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("recipe.yaml", "if this file is yours, call it something else than recipe"),
        (
            "__main__.Net",
            "a program defines it: pass it there, as in hs.TrainedRun",
        ),
    ],
)
def test_what_helps_is_said(tmp_path: Path, name: str, words: str) -> None:
    target = name if name.startswith("__main__") else "json.JSONDecoder"
    with pytest.raises(RecipeError, match=words):
        Trust(file=str(tmp_path / "recipe.yaml")).imported(target, "model.target")
    (tmp_path / "steps.csv").touch()
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(RecipeError) as error:
        Trust(file=str(tmp_path / "recipe.yaml")).imported(target, "model.target")
    assert "if this file is yours" not in str(error.value)


SOURCE = Path(trust_module.__file__).parents[1]
IMPORTERS = {"import_module", "__import__", "exec_module", "find_spec", "run_module"}

ALLOWED = {
    "recipe/trust.py": "what a recipe names, once it is judged",
    "formats/registry.py": "what the user names by --plugin, or `Trust.load_plugins` has judged",
    "recipe/instantiate.py": "torch's and hyperslab's classes that targets are compared with",
    "recipe/load.py": "torch's own",
    "util/__init__.py": "hyperslab's own, by the imports that packages show type checkers",
    "cli/__init__.py": "hyperslab's own commands",
    "kernels/registry.py": "hyperslab's own kernels",
    "launch/forked.py": "the command that starts ranks, once more in each of them",
    "train/loggers.py": "hyperslab's own loggers, by a table, and the libraries that they name",
    "util/torch_internals.py": "torch's own",
}


def importers_in(text: str) -> list[str]:
    """What imports, or looks for, a module whose name is no constant."""
    found: list[str] = []
    if not any(word in text for word in (*IMPORTERS, "ImportString")):
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            constant = bool(node.args) and isinstance(node.args[0], ast.Constant)
            if name in IMPORTERS and not constant:
                found.append(name)
        elif isinstance(node, ast.Name) and node.id == "ImportString":
            found.append(node.id)
    return found


def test_one_way_leads_from_a_recipe_to_an_import() -> None:
    paths = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    found = {name for name, path in paths.items() if importers_in(path.read_text())}
    assert found == {*ALLOWED}
    assert importers_in("importlib.import_module(name)")
    assert importers_in("TypeAdapter(ImportString)")
    assert not importers_in("importlib.import_module('triton')")
