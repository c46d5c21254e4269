"""The packages of the wheel; pyproject.toml says the rest.

Folders of data that a checkout has elsewhere go into `torchtitan/assets` under the same paths,
where torchtitan/utils/assets.py finds them.
"""

from setuptools import find_packages, setup

ASSETS = {"train_configs": ["*.toml"], "tests/assets/tokenizer": ["*.json"]}
PACKAGES = {f"torchtitan.assets.{folder.replace('/', '.')}": folder for folder in ASSETS}

setup(
    packages=[*find_packages(include=["torchtitan*"]), *PACKAGES],
    package_dir=PACKAGES,
    package_data={
        "torchtitan": [
            *("py.typed", "commands/slurm.sbatch", "commands/*.toml", "tools/planner/*.toml"),
            *(
                "tools/planner/*.js",
                "tools/launch/*.toml",
                "config/load/*.toml",
                "telemetry/*.toml",
                "data/encode/*.toml",
            ),
            *("tools/reports/*.js", "tools/reports/*.css", "tools/web/*"),
        ],
        **{package: ASSETS[folder] for package, folder in PACKAGES.items()},
    },
    include_package_data=False,
)
