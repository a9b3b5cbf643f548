#include "ferry/version.hpp"

namespace ferry {

const char* version() { return FERRY_VERSION; }
const char* commit() { return FERRY_COMMIT; }

}  // namespace ferry
