from setuptools import find_packages, setup

setup(
    name="megatron-grpo",
    version="0.1.0",
    description="Reinforcement-learning post-training of mixture-of-experts models, as a plugin for Megatron-LM",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_grpo", "megatron_grpo.*"]),
    package_data={"megatron_grpo": ["**/*.html", "**/*.js", "**/*.css"]},
    install_requires=["torch>=2.9", "megatron-core>=0.15", "psutil", "numpy", "aiohttp", "safetensors", "transformers>=5",
                      "tqdm", "pybase64", "pyarrow", "math-verify", "reasoning-gym", "tensorboard"],
    extras_require={
        # NVIDIA apex is built from source (see README.md); the `apex` on the package index is an unrelated project.
        "cuda": ["transformer-engine[pytorch]", "sglang==0.5.23"],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy"],
    },
)
