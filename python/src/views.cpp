#include "views.hpp"

#include <array>
#include <cstdint>

namespace nb = nanobind;

namespace ferry::python {
namespace {

nb::object export_array(void* data, std::size_t num_dims, const std::size_t* shape, const std::int64_t* strides,
                        nb::dlpack::dtype dtype, Place place, nb::handle owner) {
  const int device_type = place.on_gpu ? nb::device::cuda::value : nb::device::cpu::value;
  nb::ndarray<> array(data, num_dims, shape, owner, strides, dtype, device_type, place.device);
  return nb::cast(array, nb::rv_policy::reference);
}

}  // namespace

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  switch (dtype) {
    case DType::kInt32:
      return nb::dtype<std::int32_t>();
    case DType::kInt64:
      return nb::dtype<std::int64_t>();
    case DType::kFloat32:
      return nb::dtype<float>();
    case DType::kFloat16:
      return {kDLFloat, 16, 1};
    case DType::kBfloat16:
      return {kDLBfloat, 16, 1};
    case DType::kInt8:
      return nb::dtype<std::int8_t>();
    case DType::kFloat8E4M3:
      return {kDLFloat8E4M3FN, 8, 1};
    default:
      return nb::dtype<std::uint8_t>();
  }
}

nb::object array_of(const ConstTensorView& view, Place place, nb::handle owner) {
  if (!view.present()) return nb::none();
  std::array<std::size_t, kMaxTensorDims> shape{};
  for (std::size_t dim = 0; dim < shape.size(); ++dim) shape[dim] = static_cast<std::size_t>(view.shape[dim]);
  return export_array(const_cast<void*>(view.data), static_cast<std::size_t>(view.num_dims), shape.data(),
                      view.strides.data(), dlpack_dtype(view.dtype), place, owner);
}

nb::object bytes_array(void* data, std::size_t num_bytes, Place place, nb::handle owner) {
  return export_array(data, 1, &num_bytes, nullptr, nb::dtype<std::uint8_t>(), place, owner);
}

}  // namespace ferry::python
