#ifndef FERRY_PLAN_HOST_DEVICE_HPP
#define FERRY_PLAN_HOST_DEVICE_HPP

#include "ferry/device/host_device.hpp"

#endif  // FERRY_PLAN_HOST_DEVICE_HPP
