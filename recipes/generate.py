"""Print how a saved model continues a prompt, in plain transformers: turbo_nn is not imported."""

import argparse
import sys

import torch
import transformers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    ids = tokenizer(options.prompt, return_tensors="pt")
    out = model.generate(
        **ids, max_new_tokens=options.tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
    )
    assert not {"turbo_nn", "turbo_ops"} & sys.modules.keys()
    print(" ".join(tokenizer.decode(out[0], skip_special_tokens=True).split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
