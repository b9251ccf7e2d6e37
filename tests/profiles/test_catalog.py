from __future__ import annotations

import subprocess
import sys

import pytest

from profiles import catalog_names, load_cluster, load_model, shelf, yamlfile
from profiles.errors import InputError
from profiles.fileschema import validate
from profiles.hardwarefile import DeviceFile, NodeFile
from profiles.layers import Block
from profiles.modelfile import CatalogModelFile

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_models_have_exactly_their_published_parameters(name, count):
    assert load_model(name).params_total == count


@pytest.mark.parametrize("name", shelf.names("models"))
def test_every_model_has_the_counts_that_its_entry_expects(name):
    path = shelf.DATA / "models" / f"{name}.yaml"
    entry = validate(yamlfile.read(path), CatalogModelFile)
    model = load_model(name)
    assert (entry.name, model.name) == (name, name)
    assert model.params_total == entry.expect.params_total
    assert model.params_active == entry.expect.params_active
    assert load_model(str(path)) == model


@pytest.mark.parametrize(("name", "billions"), [("gpt3-13b", 13), ("gpt3-175b", 175)])
def test_gpt3_is_about_as_large_as_its_name(name, billions):
    assert load_model(name).params_total == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize("name", shelf.names("devices"))
def test_every_device_gives_the_source_of_every_number_and_a_node_that_holds_it(name):
    path = shelf.DATA / "devices" / f"{name}.yaml"
    device = validate(yamlfile.read(path), DeviceFile)
    assert device.name == name
    numbers = DeviceFile.model_fields.keys() - {
        *("schema_version", "kind", "name", "aliases", "default_node", "sources")
    }
    assert device.sources.keys() == {key for key in numbers if getattr(device, key)}
    assert load_cluster(f"1x1x{name}").groups[0].node.device.name == name


@pytest.mark.parametrize("name", shelf.names("nodes"))
def test_every_node_gives_the_source_of_every_number(name):
    node = validate(yamlfile.read(shelf.DATA / "nodes" / f"{name}.yaml"), NodeFile)
    assert node.name == name
    numbers = {"num_gpus", "gpu_link", "nics", "host_memory_gib"}
    assert node.sources.keys() == numbers | ({"islands"} if node.islands else set())


@pytest.mark.parametrize("kind", ["models", "devices", "nodes"])
def test_no_name_or_alias_stands_for_two_entries(kind):
    entries = catalog_names(kind)
    every = [each for entry in entries for each in (entry.name, *entry.aliases)]
    assert len(every) == len(set(every))
    assert set(every) == shelf.names_and_aliases(kind).keys()


def test_a_v100_has_no_bf16_rate():
    device = load_cluster("8xv100").slowest_device
    assert "bf16" not in device.peak_flop_per_s
    assert device.name == "v100-32g"


def test_aliases_are_the_same_entry():
    assert load_model("llama3-405b") == load_model("llama3.1-405b")
    assert load_model("LLaMA3-8B") == load_model("llama3-8b")


def test_gpt_has_dropout_and_llama_has_not():
    dropout = {
        name: any(isinstance(each, Block) and each.dropout for each in load_model(name).layers)
        for name in ("gpt3-175b", "llama3-8b")
    }
    assert dropout == {"gpt3-175b": True, "llama3-8b": False}


@pytest.mark.parametrize(
    ("ref", "told"),
    [
        (
            "llama3-70",
            (
                "model: 'llama3-70' is neither in the catalogue nor a file here; expected a name "
                "of the catalogue, a Hugging Face config.json or its folder, or a model YAML "
                "(did you mean llama3-70b"
            ),
        ),
        ("./llama3-8b.yaml", "model: there is no file ./llama3-8b.yaml; "),
        ("", "model: '' is neither"),
        ("x" * 5000, "model: 'xxxx"),
    ],
)
def test_an_unknown_model_may_be_a_name_or_a_path(ref, told):
    with pytest.raises(InputError) as caught:
        load_model(ref)
    assert str(caught.value).startswith(told)


def test_a_folder_without_a_config_is_told(tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model(str(tmp_path))


def test_importing_the_package_or_its_values_does_not_import_pydantic():
    code = (
        "import sys, profiles, profiles.model, profiles.cluster, profiles.training\n"
        "import profiles.calibration, profiles.topology, profiles.errors\n"
        "profiles.ModelSpec, profiles.InputError\n"
        "assert 'pydantic' not in sys.modules and 'yaml' not in sys.modules\n"
        "profiles.load_model\n"
        "assert 'pydantic' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loading_a_model_reads_its_own_entry_only(monkeypatch):
    read = []
    parse = yamlfile.parse
    monkeypatch.setattr(yamlfile, "parse", lambda *args: read.append(args[1]) or parse(*args))
    load_model("llama3-70b")
    load_model("llama3-405b")
    load_cluster("16x8xh100-80g")
    assert [path.rsplit("/", 1)[1] for path in read] == [
        "llama3-70b.yaml",
        "llama3.1-405b.yaml",
        "h100-80g.yaml",
        "dgx-h100.yaml",
        "h100-80g.yaml",
    ]


def test_the_package_knows_what_it_does_not_have():
    import profiles  # noqa: PLC0415

    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = profiles.nothing_of_this_name
