// safetensors_types.h - the format's names of element types.

#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <string_view>
#include <utility>

namespace kvcache::model {

inline constexpr std::array<std::pair<std::string_view, c10::ScalarType>, 12>
    kSafetensorsTypes{{{"F64", c10::ScalarType::Double},
                       {"F32", c10::ScalarType::Float},
                       {"F16", c10::ScalarType::Half},
                       {"BF16", c10::ScalarType::BFloat16},
                       {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
                       {"F8_E5M2", c10::ScalarType::Float8_e5m2},
                       {"I64", c10::ScalarType::Long},
                       {"I32", c10::ScalarType::Int},
                       {"I16", c10::ScalarType::Short},
                       {"I8", c10::ScalarType::Char},
                       {"U8", c10::ScalarType::Byte},
                       {"BOOL", c10::ScalarType::Bool}}};

}  // namespace kvcache::model
