"""The GGUF as onnxruntime-genai reads it: int4 in blocks of 32, accuracy level 4.

usage: onnxruntime_model.py MODEL.gguf FOLDER
The weights are dequantised and quantised again, so its tokens are not those of
the file's weights.
"""

import os
import subprocess
import sys
import tempfile

import transformers


def main():
    path, folder = os.path.abspath(sys.argv[1]), sys.argv[2]
    place, name = os.path.split(path)
    part = folder + ".part"
    with tempfile.TemporaryDirectory() as plain:
        model = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file=name)
        model.save_pretrained(plain)
        transformers.AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(plain)
        subprocess.run(
            [
                *(sys.executable, "-m", "onnxruntime_genai.models.builder"),
                *("-i", plain, "-o", part, "-p", "int4", "-e", "cpu", "-c", plain),
                *("--extra_options", "int4_accuracy_level=4", "int4_block_size=32"),
            ],
            check=True,
        )
    os.rename(part, folder)


main()
