"""Parts of a user's own, registered by name: texts of recipes, saved models and commands take them."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import isentrope as ise
from isentrope.cli import app
from isentrope.experiments.checkpoints import SHIPPED_MODELS
from isentrope.parts import Part
from isentrope.positions.regions import NearAndFar
from isentrope.recipe import KINDS, OWN_PARTS, PARTS, hash_own_parts, register_part
from isentrope.share import Share
from isentrope.temperatures import Temperature
from isentrope.training.config import build_config
from tests.fixtures.commands import assert_one_line
from tests.fixtures.registered_parts import forget_registered

LLAMA = SHIPPED_MODELS / "llama"
FILE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from isentrope.recipe import register_part
from isentrope.temperatures import Temperature

@register_part
@dataclass(frozen=True)
class Root(Temperature):
    "τ = (n / n_tr)^{1 / degree} (Me, 2026)."

    train_length: int
    degree: float = 8.0

    @property
    def unit_length(self) -> float:
        return self.train_length

    def law(self, n: torch.Tensor, head_dim: int) -> torch.Tensor:
        return (n / self.train_length) ** (1 / self.degree)
"""
PLAN = """
dtype: float32
perplexity: {edges: [0, 256, 512], documents: 2, texts: {code: code.txt}}
recipes: [plain, "rerope:window=128", "rerope:window=128+root", "yarn:factor=2+yarntemperature:factor=2"]
"""


@pytest.fixture(autouse=True)
def registry():
    with forget_registered():
        yield


@dataclass(frozen=True)
class Root(Temperature):
    """τ = (n / n_tr)^{1 / degree}."""

    train_length: int
    degree: float = 8.0

    @property
    def unit_length(self):
        return self.train_length

    def law(self, n, head_dim):
        return (n / self.train_length) ** (1 / self.degree)


def test_a_temperature_by_its_name():
    with pytest.raises(ValueError, match="unknown part 'root'"):
        ise.Recipe.parse("root:train_length=8")
    assert register_part(Root) is Root
    recipe = ise.Recipe.parse("root:train_length=8,degree=4")
    assert recipe.temperature == Root(8, 4) and str(recipe) == "root:train_length=8,degree=4"
    assert ise.Recipe.from_dict(recipe.to_dict()) == recipe
    q, k, v = torch.randn(3, 1, 2, 40, 16, dtype=torch.float64)
    n = torch.arange(1, 41, dtype=torch.float64)[:, None]
    scores = q @ k.mT / 4 * (n / 8).clamp_min(1) ** 0.25
    expected = scores.masked_fill(n.mT > n, -math.inf).softmax(-1) @ v
    torch.testing.assert_close(ise.attention(q, k, v, "root:train_length=8,degree=4", causal=True), expected)


def test_a_new_version_of_a_class_replaces_the_old_one():
    register_part(Root)
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    before = ise.attention(q, k, v, "root:train_length=8", causal=True)
    newer = dataclass(frozen=True)(type("Root", (Root,), {"law": lambda self, n, head_dim: torch.ones_like(n)}))
    newer.__module__, newer.__qualname__ = Root.__module__, Root.__qualname__
    register_part(newer)
    after = ise.attention(q, k, v, "root:train_length=8", causal=True)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, ise.attention(q, k, v, causal=True))
    assert [part for part in KINDS["temperature"] if part.name() == "root"] == [newer]


def test_a_training_is_another_one_after_a_change_of_the_file():
    config = build_config("train", recipe="rope+root:train_length=8")
    register_part(Root)
    (source,) = config.identity()["parts"].values()
    assert build_config("train").identity().keys() == config.identity().keys() - {"parts"}
    OWN_PARTS["root"] = "the file has been changed"
    assert config.identity()["parts"] != {"root": source}


def test_a_saved_model_needs_its_part(tmp_path):
    register_part(Root)
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype="float32")
    ids = torch.randint(5, 90, (1, 300))
    ise.extend(model, "rerope:window=128+root")
    assert model.config.isentrope["recipe"]["temperature"] == {"name": "root", "train_length": 256}
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        assert torch.equal(ise.load(tmp_path)(ids).logits, model(ids).logits)
    del PARTS["root"]
    with pytest.raises(ValueError, match="unknown part 'root'"):
        ise.load(tmp_path)


def test_a_position_method_with_near_and_far_keys():
    @register_part
    @dataclass(frozen=True)
    class HalfWay(NearAndFar):
        """Distance Δ for Δ < w, w / 2 beyond."""

        def far(self, query, key, sign, lengths):
            return sign * self.window / 2, None

    assert PARTS["halfway"] == ("position", HalfWay)
    q, k, v = torch.randn(3, 1, 2, 60, 16, dtype=torch.float64)
    distance = torch.arange(60.0, dtype=torch.float64)[:, None] - torch.arange(60)
    angle = distance.where(distance < 12, 6.0)[..., None] * 10000.0 ** (-torch.arange(8) / 8)
    (q1, q2), (k1, k2) = (x[..., None, :].chunk(2, -1) for x in (q, k))
    k1, k2 = k1.transpose(-2, -3), k2.transpose(-2, -3)
    scores = ((q1 * k1 + q2 * k2) * angle.cos() + (q1 * k2 - q2 * k1) * angle.sin()).sum(-1) / 4
    expected = scores.masked_fill(distance < 0, -math.inf).softmax(-1) @ v
    torch.testing.assert_close(ise.attention(q, k, v, "halfway:window=12", causal=True), expected)


def test_a_share_law_of_ones_own_acts_on_chosen_keys():
    @register_part
    @dataclass(frozen=True)
    class Strict(Share):
        """Far logits s - 5."""

        def bias(self, n_far):
            return torch.full_like(n_far, -5.0)

    q, k, v = torch.randn(3, 1, 2, 80, 16, dtype=torch.float64)
    rest = "retrieve:blocks=2,size=8,sinks=8,queries=1"
    outputs = [
        ise.attention(q, k, v, f"rerope:window=16+{law}:reference=64+{rest}", causal=True, backend=backend)
        for law in ("share", "strict")
        for backend in ("auto", "reference")
    ]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[2], outputs[3])
    assert (outputs[0] - outputs[2]).abs().max() > 0.1


def test_parts_with_the_method_alone_extend_a_model_and_are_described():
    @dataclass(frozen=True)
    class Warm(Part):
        def scale(self, n, head_dim):
            return torch.full_like(n, 1.5)

    @dataclass(frozen=True)
    class Strict(Part):
        def bias(self, n_far):
            return torch.full_like(n_far, -5.0)

    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype="float32")
    recipe = ise.Recipe(position=ise.ReRoPE(64), temperature=Warm(), share=Strict())
    description = str(ise.describe(ise.extend(model, recipe)))
    assert "1024→1.5" in description and "1024→-5" in description


def test_refusals():
    class NoKind(Part):
        pass

    class NoDataclass(Temperature):
        degree: float = 8.0

    class ReRoPE(Temperature):
        pass

    class Plain(Temperature):
        pass

    for part, message in (
        (NoKind, "expected the class of a part"),
        (object(), "expected the class of a part"),
        (NoDataclass, "expected a dataclass, got .*NoDataclass; put @dataclass below it"),
        (ReRoPE, "expected a name that no other part has, got 'rerope'"),
        (Plain, "expected a name that no other part has, got 'plain'"),
    ):
        with pytest.raises(ValueError, match=message):
            register_part(part)


def test_a_class_without_a_file_is_known_by_its_code(monkeypatch):
    """As in a notebook: the same text gives the same hash, another formula or default another one."""
    notebook = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)

    def hash_class(source):
        exec(source, vars(notebook))
        return OWN_PARTS["root"]

    same, again = hash_class(FILE), hash_class(FILE)
    others = [hash_class(FILE.replace(a, b)) for a, b in (("1 / self", "2 / self"), ("= 8.0", "= 4.0"))]
    assert same == again and len({same, *others}) == 3


def test_what_a_recipe_does_not_name_does_not_count():
    register_part(Root)
    assert hash_own_parts("rerope:window=8+root:degree=4").keys() == {"root"}
    assert not hash_own_parts("rerope:window=8+rooted")


def test_files_of_one_name_in_two_folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "laws.py").write_text(FILE)
    (tmp_path / "a" / "laws.py").write_text(FILE.replace("import torch", "import torch, beside_laws"))
    (tmp_path / "a" / "beside_laws.py").write_text("")
    options = [word for name in ("a", "b") for word in ("--parts", str(tmp_path / name / "laws.py"))]
    result = CliRunner().invoke(app, [*options, "recipes"])
    assert "expected a name that no other part has, got 'root'" in str(result.exception)


def test_a_file_beside_that_is_imported_counts(tmp_path):
    hashes = []
    for factor in (1, 1, 2):
        (tmp_path / "laws.py").write_text(FILE.replace("import torch", "import torch, beside_root"))
        (tmp_path / "beside_root.py").write_text(f"FACTOR = {factor}")
        (tmp_path / "not_imported.py").write_text(f"{len(hashes)}")
        with forget_registered():
            result = CliRunner().invoke(app, ["--parts", str(tmp_path / "laws.py"), "recipes", "root"])
            assert result.exit_code == 0, result.output
            hashes.append(OWN_PARTS["root"])
        del sys.modules["beside_root"]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_file_that_is_not_there(tmp_path):
    result = CliRunner().invoke(app, ["--parts", str(tmp_path / "laws.py"), "recipes"])
    assert_one_line(result, "parts: expected a Python file, got")


@pytest.mark.figures
def test_a_law_of_ones_own_is_compared_with_yarn(tmp_path):
    (tmp_path / "laws.py").write_text(FILE)
    listed = CliRunner().invoke(app, ["--parts", str(tmp_path / "laws.py"), "recipes", "root", "--json"])
    (part,) = json.loads(listed.stdout)["parts"]
    assert part["kind"] == "temperature" and part["source"] == "Me, 2026"
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "code.txt").write_text("def add(x, y):\n    return x + y\n\n\n" * 20)
    command = ["--parts", str(tmp_path / "laws.py"), "compare", str(tmp_path / "plan.yaml"), "--model", str(LLAMA)]
    more = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, [*command, *more])
    assert result.exit_code == 0, result.output
    (comparison,) = json.loads(result.stdout)["comparisons"]
    rows = {row["recipe"]: row for row in comparison["leaderboard"]["rows"]}
    assert len(rows) == 4 and rows["rerope:window=128+root"]["ratio"] != rows["rerope:window=128"]["ratio"]
    (tmp_path / "laws.py").write_text(FILE.replace("1 / self.degree", "2 / self.degree"))
    assert_one_line(CliRunner().invoke(app, [*command, *more]), "the files of your own parts differ); choose another")
