"""What is installed is what is in the folders."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("server", "engine", "kernels")


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_folder_with_modules_is_listed():
    on_disk = {
        "pagestream." + ".".join(path.parent.relative_to(ROOT).parts) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == on_disk


def test_kernels_is_a_namespace_portion():
    # A regular package of that name would be taken for another distribution by libraries that look for it.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_files_that_are_not_modules_are_listed_as_package_data():
    listed = pyproject()["tool"]["setuptools"]["package-data"]
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if not path.is_file() or path.suffix in {".py", ".pyc", ".md"}:
                continue
            package = "pagestream." + ".".join(path.parent.relative_to(ROOT).parts)
            assert any(path.match(pattern) for pattern in listed.get(package, [])), f"{path} is not installed"


def test_no_unsupported_torch_is_admitted():
    (torch,) = [need for need in pyproject()["project"]["dependencies"] if need.startswith("torch")]
    assert torch == "torch>=2.9,<2.14"
