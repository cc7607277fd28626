"""Builds ASTRA-sim with its analytical network backend from sources that lie on this machine; downloads nothing.

    python benchmarks/build_astra_sim.py --sources FOLDER [--build out/astra_sim] [--jobs 2]

FOLDER is a checkout of https://github.com/astra-sim/astra-sim with its submodules (`git clone --recursive`), or a
folder of clones of it and of what it is made of, each called NAME, OWNER+NAME or OWNER+NAME/repo:

    astra-sim, chakra, astra-network-analytical, astra-memory-analytical, fmt, spdlog, yaml-cpp
    protobuf           only if no `protoc` is installed; its release 21.12 is then built, too

It needs git, cmake and a C++ compiler, and takes 5 minutes on two cores, 15 with protobuf. Prints the folder of the
programs, for `benchmarks/astra_sim.py --bin`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = "AstraSim_Analytical_Congestion_Unaware"
SUBMODULES = {  # where a checkout has them
    "chakra": "extern/graph_frontend/chakra",
    "astra-network-analytical": "extern/network_backend/analytical",
    "astra-memory-analytical": "extern/remote_memory_backend/analytical",
    "fmt": "extern/helper/fmt",
    "spdlog": "extern/helper/spdlog",
}
NEEDED = {"chakra": "src/feeder_v3/et_feeder.h"}
PROTOBUF = "v21.12"  # the last release that needs no other library


def build(sources: Path, target: Path, jobs: int) -> Path:
    """Build in `target`; the folder of the programs. What is there already is not built again."""
    for tool in ("git", "cmake", "c++"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} was not found; install git, cmake and a C++ compiler")
    if not sources.is_dir():
        raise SystemExit(f"--sources {sources}: no such folder")
    sources, target = sources.resolve(), target.resolve()
    checkout = target / "astra-sim"
    programs = checkout / "build/astra_analytical/build/bin"
    if (programs / PROGRAM).exists():
        return programs
    target.mkdir(parents=True, exist_ok=True)
    _check_out(sources, checkout)
    protobuf = _protobuf(sources, target, jobs)
    environment = os.environ | {
        "PATH": f"{protobuf / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CMAKE_PREFIX_PATH": str(protobuf),
    }
    schema = checkout / "extern/graph_frontend/chakra/schema/protobuf"
    _run(["protoc", "et_def.proto", f"--proto_path={schema}", f"--cpp_out={schema}"], checkout, environment)
    work = programs.parent
    work.mkdir(exist_ok=True)
    options = ["-DBUILDTARGET=all", "-DCMAKE_POLICY_VERSION_MINIMUM=3.5"]
    options += [*_yaml(sources, target, checkout), *_names(target, checkout)]
    _run(["cmake", "..", *options], work, environment)
    _run(["cmake", "--build", ".", "-j", str(jobs)], work, environment)
    return programs


def _check_out(sources: Path, checkout: Path) -> None:
    """ASTRA-sim with its submodules, as a copy: the sources are left as they are."""
    _clone(sources, "astra-sim", checkout)
    for name, place in SUBMODULES.items():
        part = checkout / place
        if part.is_dir() and any(part.iterdir()):
            continue
        named = _output(["git", "ls-tree", "HEAD", place], checkout).split()
        inside = _find(sources, "astra-sim") / place
        shutil.rmtree(part, ignore_errors=True)
        if inside.is_dir() and any(inside.iterdir()):
            shutil.copytree(inside, part, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        else:
            _clone(sources, name, part, named[2] if len(named) > 2 else None)


def _find(sources: Path, name: str) -> Path:
    """The clone of a repository."""
    places = [sources / name, *sorted(sources.glob(f"*+{name}/repo")), *sorted(sources.glob(f"*+{name}"))]
    if name == "astra-sim":
        places.insert(0, sources)
    for place in places:
        found = subprocess.run(["git", "-C", str(place), "rev-parse", "HEAD"], capture_output=True, text=True)
        is_root = (place / ".git").exists() or (place / "HEAD").exists()
        if place.is_dir() and is_root and found.returncode == 0:
            return place
    raise SystemExit(f"--sources {sources}: no clone of {name} in it; see the head of {Path(__file__).name}")


def _clone(sources: Path, name: str, to: Path, commit: str | None = None) -> Path:
    if to.is_dir() and any(to.iterdir()):
        return to
    _run(["git", "clone", "--quiet", "--no-checkout", str(_find(sources, name)), str(to)], sources)
    chosen = commit if commit and _has(to, f"{commit}^{{commit}}") else _another(to, name)
    if commit and chosen != commit:
        other = _output(["git", "log", "-1", "--format=%h of %cs", chosen], to).strip()
        print(f"{name}: the clone lacks {commit[:9]}, which is asked for; using {chosen}, {other}", flush=True)
    _run(["git", "checkout", "--quiet", chosen], to)
    return to


def _another(clone: Path, name: str) -> str:
    """What is checked out where a clone lacks the named commit: the first branch that has what ASTRA-sim needs."""
    branches = _output(["git", "for-each-ref", "--format=%(refname:short)", "refs/remotes"], clone).split()
    for branch in ("HEAD", *branches):
        if _has(clone, f"{branch}:{NEEDED.get(name, '')}"):
            return branch
    raise SystemExit(f"{name}: no branch of the clone has {NEEDED[name]}; fetch a newer one")


def _has(clone: Path, what: str) -> bool:
    return subprocess.run(["git", "cat-file", "-e", what], cwd=clone, capture_output=True).returncode == 0


def _yaml(sources: Path, target: Path, checkout: Path) -> list[str]:
    """The option that names yaml-cpp, which cmake would download otherwise. Older network backends have their own."""
    own = checkout / SUBMODULES["astra-network-analytical"] / "extern/yaml-cpp"
    if not any(sources.glob("*yaml-cpp*")):
        print("no clone of yaml-cpp: cmake downloads it, if it can", flush=True)
        return [f"-DFETCHCONTENT_SOURCE_DIR_YAML-CPP={own}"] if (own / "CMakeLists.txt").exists() else []
    found = _clone(sources, "yaml-cpp", target / "yaml-cpp")
    if own.is_dir() and not (own / "CMakeLists.txt").exists():  # a submodule that the checkout above replaces
        (own / "CMakeLists.txt").write_text("# the target yaml-cpp is there already\n")
    return [f"-DFETCHCONTENT_SOURCE_DIR_YAML-CPP={found}"]


def _names(target: Path, checkout: Path) -> list[str]:
    """The option that gives the feeder of an older chakra the names by which ASTRA-sim calls it."""
    feeder = checkout / SUBMODULES["chakra"] / "src/feeder_v3"
    if any("using ETFeeder =" in file.read_text(errors="replace") for file in feeder.glob("*.h")):
        return []
    classes = ("ETFeeder", "ETFeederNode")
    declared = "".join(f"class {name}; " for name in classes)
    named = "".join(f"using {name} = FeederV3::{name}; " for name in classes)
    header = target / "feeder_names.h"
    header.write_text(f"#pragma once\nnamespace Chakra {{ namespace FeederV3 {{ {declared}}} {named}}}\n")
    return [f"-DCMAKE_CXX_FLAGS=-include {header}"]


def _protobuf(sources: Path, target: Path, jobs: int) -> Path:
    """The folder in which protobuf is installed; built here if the machine has none."""
    found = shutil.which("protoc")
    if found is not None:
        return Path(found).resolve().parents[1]
    installed = target / "protobuf"
    if (installed / "bin/protoc").exists():
        return installed
    print("no protoc is installed: protobuf is built, too", flush=True)
    source = _clone(sources, "protobuf", target / "protobuf-source", PROTOBUF)
    work = source / "build"
    work.mkdir(exist_ok=True)
    options = [
        f"-DCMAKE_INSTALL_PREFIX={installed}", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS=-O1",
        "-Dprotobuf_BUILD_TESTS=OFF", "-Dprotobuf_WITH_ZLIB=OFF", "-DCMAKE_POSITION_INDEPENDENT_CODE=ON",
        "-DCMAKE_POLICY_VERSION_MINIMUM=3.5",
    ]  # fmt: skip
    _run(["cmake", "..", *options], work)
    _run(["cmake", "--build", ".", "-j", str(jobs)], work)
    _run(["cmake", "--install", "."], work)
    return installed


def _run(command: list[str], where: Path, environment: dict[str, str] | None = None) -> None:
    print("$", " ".join(command), flush=True)
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}, in {where}, failed:\n{(done.stdout + done.stderr)[-4000:]}")


def _output(command: list[str], where: Path) -> str:
    return subprocess.run(command, cwd=where, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--build", type=Path, default=Path("out/astra_sim"), metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    sys.stdout.write(f"{build(options.sources, options.build, options.jobs)}\n")


if __name__ == "__main__":
    main()
