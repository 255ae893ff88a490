// Continues token ids greedily with a model that `weft export --to aoti` compiled. Needs libtorch, not Python.
//
//     generate OUT/model.pt2 NEW_TOKENS ID ID ...
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: generate MODEL.pt2 NEW_TOKENS ID ...\n";
    return 2;
  }
  c10::InferenceMode mode;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  auto metadata = model.get_metadata();

  // The layout of the cache: "HEADSxSIZE" for the keys and for the values of each layer.
  auto dtype = metadata.at("dtype") == "bfloat16" ? at::kBFloat16 : metadata.at("dtype") == "float16" ? at::kHalf : at::kFloat;
  std::vector<at::Tensor> past;
  std::istringstream layout(metadata.at("cache"));
  for (std::string entry; layout >> entry;) {
    auto x = entry.find('x');
    past.push_back(torch::empty({1, std::stol(entry.substr(0, x)), 0, std::stol(entry.substr(x + 1))}, dtype));
  }

  std::vector<int64_t> ids;
  for (int i = 3; i < argc; i++) ids.push_back(std::stoll(argv[i]));
  auto tokens = torch::tensor(ids, at::kLong).unsqueeze(0);
  int64_t first = 0;
  for (int step = 0; step < std::stoi(argv[2]); step++) {
    std::vector<at::Tensor> inputs{tokens, torch::arange(first, first + tokens.size(1)).unsqueeze(0)};
    inputs.insert(inputs.end(), past.begin(), past.end());
    auto outputs = model.run(inputs);
    first += tokens.size(1);
    tokens = outputs[0].select(1, -1).argmax(-1, true).contiguous();
    past.assign(outputs.begin() + 1, outputs.end());
    std::cout << tokens.item<int64_t>() << "\n";
  }
}
